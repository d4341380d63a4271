from tasks import app

from celery_lease import history

for job in sorted(history.jobs(app), key=lambda job: job.created_at):
    attempts = history.job(app, job.id).attempts
    print(job.task, job.state, app.AsyncResult(job.id).result)
    for one in attempts:
        print(f"  token {one.fencing_token}: {one.worker} {one.state}")
