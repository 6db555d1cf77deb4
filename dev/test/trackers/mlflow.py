"""A stand-in for mlflow, as wandb.py. Equal metrics are recorded twice, and counted once by the test, as a database does."""
from types import SimpleNamespace

import record


class Metric:
    def __init__(self, key, value, timestamp, step, model_id=None, dataset_name=None, dataset_digest=None, run_id=None):
        assert isinstance(timestamp, int) and isinstance(step, int) and isinstance(value, float)
        self.key, self.value, self.timestamp, self.step = key, value, timestamp, step


class Param:
    def __init__(self, key, value):
        self.key, self.value = key, value


entities = SimpleNamespace(Metric=Metric, Param=Param)


class MlflowClient:
    def __init__(self, tracking_uri=None, registry_uri=None):
        pass

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="e1") if record.calls("experiment") else None

    def create_experiment(self, name, artifact_location=None, tags=None):
        record.put("experiment", name=name)
        return "e1"

    def search_runs(self, experiment_ids, filter_string="", run_view_type=1, max_results=1000, order_by=None, page_token=None):
        found = [c for c in record.calls("init") if filter_string == f"tags.track_id = '{c['tag']}'"]
        params = {k: v for c in record.calls("params") for k, v in c["params"].items()}
        data = SimpleNamespace(params=params, tags={})
        return [SimpleNamespace(info=SimpleNamespace(run_id=c["run"]), data=data) for c in found]

    def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
        record.put("init", project=experiment_id, run="r" + tags["track_id"], tag=tags["track_id"], name=run_name, config=None)
        return SimpleNamespace(info=SimpleNamespace(run_id="r" + tags["track_id"]))

    def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
        assert len(metrics) <= 1000 and len(params) <= 100
        if params:
            record.put("params", params={p.key: p.value for p in params})
        for m in metrics:
            record.put("log", run=run_id, step=m.step, numbers={m.key: m.value}, at=m.timestamp)

    def set_tag(self, run_id, key, value, synchronous=None):
        assert key == "mlflow.note.content"
        record.put("note", text=value)

    def log_artifact(self, run_id, local_path, artifact_path=None):
        record.put("file", path=local_path, base=artifact_path)

    def set_terminated(self, run_id, status=None, end_time=None):
        record.put("finish")
