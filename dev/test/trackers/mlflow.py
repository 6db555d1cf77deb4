"""A stand-in for mlflow, as wandb.py."""
from types import SimpleNamespace

from wandb import calls, put

entities = SimpleNamespace(
    Metric=lambda key, value, timestamp, step: (key, float(value), int(timestamp), step),
    Param=lambda key, value: (key, value),
)


def run_of(run_id, params=()):
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id), data=SimpleNamespace(params=params))


class MlflowClient:
    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="e1") if calls("experiment") else None

    def create_experiment(self, name):
        put("experiment", name=name)
        return "e1"

    def search_runs(self, experiment_ids, filter_string):
        params = {k for c in calls("params") for k in c["params"]}
        return [run_of(c["run"], params) for c in calls("init") if filter_string == f"tags.track_id = '{c['run']}'"]

    def create_run(self, experiment_id, tags, run_name):
        put("init", run=tags["track_id"])
        return run_of(tags["track_id"])

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(metrics) <= 1000 and len(params) <= 100
        if params:
            put("params", params=dict(params))
        for key, value, _, step in metrics:
            put("log", run=run_id, step=step, numbers={key: value})

    def log_artifact(self, run_id, local_path, artifact_path):
        put("file", path=local_path)

    def set_terminated(self, run_id):
        pass
