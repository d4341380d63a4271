from tasks import build

print(build.delay("annual").id)
