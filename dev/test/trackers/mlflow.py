"""A stand-in for mlflow, as wandb.py."""
from types import SimpleNamespace

import record


def metric(key, value, timestamp, step):
    assert isinstance(timestamp, int) and isinstance(step, int) and isinstance(value, float)
    return SimpleNamespace(key=key, value=value, step=step)


entities = SimpleNamespace(Metric=metric, Param=lambda key, value: (key, value))


class MlflowClient:
    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="e1") if record.calls("experiment") else None

    def create_experiment(self, name):
        record.put("experiment", name=name)
        return "e1"

    def search_runs(self, experiment_ids, filter_string):
        found = [c for c in record.calls("init") if filter_string == f"tags.track_id = '{c['tag']}'"]
        data = SimpleNamespace(params={k for c in record.calls("params") for k in c["params"]})
        return [SimpleNamespace(info=SimpleNamespace(run_id=c["run"]), data=data) for c in found]

    def create_run(self, experiment_id, tags, run_name):
        record.put("init", run="r" + tags["track_id"], tag=tags["track_id"])
        return SimpleNamespace(info=SimpleNamespace(run_id="r" + tags["track_id"]))

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(metrics) <= 1000 and len(params) <= 100
        if params:
            record.put("params", params=dict(params))
        for m in metrics:
            record.put("log", run=run_id, step=m.step, numbers={m.key: m.value})

    def log_artifact(self, run_id, local_path, artifact_path):
        record.put("file", path=local_path)

    def set_terminated(self, run_id):
        pass
