from tasks import app

from celery_lease import history

for job in history.jobs(app):
    print(job.state, job.id, f"lost {job.lost_count}")
    for one in history.job(app, job.id).attempts:
        print(f"  token {one.fencing_token}: {one.worker} {one.state} {one.stop_reason or ''}")
