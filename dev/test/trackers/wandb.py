"""A stand-in for wandb: calls of scripts/track.py go as lines of JSON to the file that TRACK_RECORD names."""
import record


class Run:
    def __init__(self, run_id):
        self.notes, self.id = None, run_id

    def __setattr__(self, name, value):
        if name == "notes" and value:
            record.put("note", text=value)
        super().__setattr__(name, value)

    def define_metric(self, name, step_metric=None):
        record.put("define", name=name, step_metric=step_metric)

    def log(self, data):
        assert isinstance(data["step"], int)
        record.put("log", run=self.id, step=data["step"], numbers={k: v for k, v in data.items() if k != "step"})

    def save(self, glob_str, base_path, policy):
        record.put("file", path=str(glob_str), base=str(base_path))

    def finish(self):
        record.put("finish")


def init(*, project, id, name, config, resume):
    assert id and resume == "allow"
    record.put("init", project=project, run=id, name=name, config=config)
    return Run(id)
