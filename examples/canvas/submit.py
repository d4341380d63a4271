from tasks import all_of

print(all_of(900).delay().id)
