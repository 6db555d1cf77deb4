#!/usr/bin/env python3
"""Fetch a model of the Hugging Face Hub for `-e hub:NAME`: `scripts/download.py NAME`, or NAME@REVISION.

Downloads the files that the trainers read into the cache of huggingface_hub (HF_HOME; by default ~/.cache/huggingface),
unless they are already there. Prints the directory. Needs `pip install huggingface_hub`.
"""
import os
import sys

from upload import FILES, Parser, need, quietly, refuse, run


def main():
    parser = Parser(__doc__)
    parser.add_argument("name", metavar="NAME", help="MODEL or ORGANIZATION/MODEL, then perhaps @REVISION")
    name, _, revision = parser.parse_args().name.removeprefix("hub:").partition("@")
    fetch = need("huggingface_hub").snapshot_download
    if not sys.stderr.isatty():
        need("huggingface_hub.utils").disable_progress_bars()
    path = quietly("download of", name, lambda: fetch(name, revision=revision or None, allow_patterns=FILES))
    for needed, others in (("config.json", ()), ("model.safetensors", ("model.safetensors.index.json",))):
        if not any(os.path.exists(os.path.join(path, file)) for file in (needed, *others)):
            refuse(f"{name}: its repository has no {needed}, which the trainers need")
    print(path)


if __name__ == "__main__":
    sys.exit(run(main))
