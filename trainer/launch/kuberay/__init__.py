"""`trainer.launcher: kubernetes`: trainer and runner as a KubeRay RayJob, followed from here as if it were a process of its own.

The process that the supervisor started (`job.submit`) stands in for the trainer: it asks for the job, prints its log, says what it waits
for, ends with its exit code, and deletes it when told to end or when it is over. A job is known by the uid that the API server gave it
(`JobFile` in the run's directory), so one that an earlier stand-in left behind is taken up again, and no other is ever touched.
"""

RUNS, SECRET = "/lego-rl/runs", "/lego-rl/secret"
"""Where every pod has the claim `runs`, and the Secret with its one file, run.json."""
