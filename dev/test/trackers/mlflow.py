"""A stand-in for mlflow, as wandb.py. It has the experiments that are asked for and, once it was called, the runs."""
import os
from types import SimpleNamespace as Object

from wandb import Recorder

entities = Object(Metric=lambda key, value, timestamp, step: (step, key, value), Param=lambda *pair: pair)


class MlflowClient(Recorder):
    def get_experiment_by_name(self, name):
        return Object(experiment_id=name)

    def create_run(self, experiment, tags, run_name):
        return Object(info=Object(run_id=tags["track_id"]), data=Object(params={}))

    def search_runs(self, experiments, filter_string):
        run = self.create_run(experiments, {"track_id": filter_string.split("'")[1]}, "")
        return [run] * os.path.exists(os.environ["TRACK_RECORD"])
