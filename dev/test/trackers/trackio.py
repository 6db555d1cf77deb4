"""A stand-in for trackio, as wandb.py. What was logged is written when the run ends, as by the real one's thread."""
import record


class Run:
    def __init__(self, name):
        self.name, self.waiting = name, []

    def log(self, metrics, step=None):
        self.waiting.append((metrics, step))

    def finish(self):
        for metrics, step in self.waiting:
            if "note" in metrics:
                record.put("note", text=metrics["note"])
            else:
                record.put("log", run=self.name, step=step, numbers=metrics)
        self.waiting = []


def init(project, name=None, group=None, space_id=None, dataset_id=None, config=None, resume="never", settings=None, private=None, embed=True):
    assert resume == "allow"
    record.put("init", project=project, run=name, name=name, config=config)
    return Run(name)
