"""A stand-in for wandb: calls of scripts/track.py go as lines of JSON to the file that TRACK_RECORD names."""
import record


class Run:
    def __init__(self, run_id):
        self.id = run_id

    def define_metric(self, name, step_metric=None):
        assert name == "step" or step_metric == "step"

    def log(self, data):
        assert isinstance(data["step"], int)
        record.put("log", run=self.id, step=data["step"], numbers={k: v for k, v in data.items() if k != "step"})

    def save(self, glob_str, base_path, policy):
        record.put("file", path=str(glob_str))

    def finish(self):
        pass


def init(*, project, id, name, config, resume):
    assert project and name and id and resume == "allow"
    record.put("init", run=id, config=config)
    return Run(id)
