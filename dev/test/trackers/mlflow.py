"""A stand-in for mlflow, as wandb.py."""
from unittest.mock import MagicMock

from wandb import record

entities, MlflowClient = MagicMock(Metric=lambda key, value, _, step: (step, key, value)), MagicMock()
client = MlflowClient.return_value
client.create_run.return_value.info.run_id = "a"
client.log_param = lambda _, *setting: record([(0, *setting)])
client.log_batch = lambda _, metrics: record(metrics)
