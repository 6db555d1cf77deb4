#!/usr/bin/env python3
"""Upload a model directory to the Hugging Face Hub: `scripts/upload.py DIR NAME`, where NAME is ORGANIZATION/MODEL.

DIR is the OUT of a run, one of its checkpoints or any Hugging Face directory. Config, weights, tokenizer, model card
and loss plot are sent; optimizer states, checkpoints and logs are not. After an interruption, run the same command
again: uploaded files are not sent again. Needs `pip install huggingface_hub` and a token: `hf auth login` or HF_TOKEN.
"""
import errno
import os
import sys

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "dev"))
from user_error import Parser, UserError, masked, need, read_json, run  # noqa: E402

FILES = ["README.md", "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
         "model-*-of-*.safetensors", "vocab.json", "merges.txt", "encoder.json", "vocab.bpe", "vocab.txt",
         "gpt2_tokenizer.bin", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "chat_template.jinja", "loss.svg"]


def refuse(message):
    raise UserError(message)


def weights_of(folder):
    """The names of the files that hold the model's weights."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.isfile(os.path.join(folder, "model.safetensors")) or not os.path.isfile(index):
        return ["model.safetensors"]
    try:
        names = set(read_json(index)["weight_map"].values())
        return sorted(name for name in names if isinstance(name, str)) or ["model.safetensors"]
    except (KeyError, TypeError, AttributeError) as e:
        refuse(f"{index}: does not say where the weights are: {type(e).__name__}")


def quietly(what, name, call):
    """The result of a call of the library, whose errors become one line. what: "upload to" or "download of"."""
    from huggingface_hub import errors

    # The error of the HTTP library below, which differs between versions.
    network = next(base for base in errors.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    address = os.environ.get("HF_ENDPOINT", "the Hub")
    try:
        return call()
    except errors.HFValidationError as e:
        refuse(f"{name}: {e}")
    except errors.GatedRepoError:
        refuse(f"{name}: access must be asked for on its page first")
    except errors.RepositoryNotFoundError:
        refuse(f"{name}: {address} has no such repository, or your token may not use it (hf auth login)")
    except errors.RevisionNotFoundError:
        refuse(f"{name}: the repository has no such revision")
    except errors.HfHubHTTPError as e:
        status = e.response.status_code if e.response is not None else 0
        if status in (401, 403):
            refuse(f"{what} {name}: {address} refuses your token, or there is none: hf auth login, or set HF_TOKEN")
        refuse(f"{what} {name}: {e.server_message or str(e).splitlines()[0]} (status {status}); give the same command again")
    except (network, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, OSError) as e:
        if getattr(e, "errno", None) == errno.ENOSPC:
            raise
        refuse(f"{what} {name}: {address} cannot be reached: {str(e).splitlines()[0] if str(e) else type(e).__name__}")
    except ValueError as e:
        refuse(f"{what} {name}: {e}")


def main():
    parser = Parser(__doc__)
    parser.add_argument("dir", metavar="DIR", help="the model directory")
    parser.add_argument("name", metavar="NAME", help="ORGANIZATION/MODEL or USER/MODEL; made if it does not exist")
    parser.add_argument("--private", action="store_true", help="a new repository is private")
    parser.add_argument("--message", default="Upload a model", help="of the commit")
    options = parser.parse_args()
    if not os.path.isfile(os.path.join(options.dir, "config.json")):
        refuse(f"{options.dir}: is not a model directory: it has no config.json")
    for name in weights_of(options.dir):
        if not os.path.isfile(os.path.join(options.dir, name)):
            refuse(f"{options.dir}: has no weights ({name})")
    if options.name.count("/") != 1:
        refuse(f"{options.name}: is not ORGANIZATION/MODEL or USER/MODEL")
    if not os.path.isfile(os.path.join(options.dir, "README.md")):
        print(f"{options.dir}: has no README.md, so the repository gets no model card")
    api = need("huggingface_hub").HfApi()
    if not sys.stderr.isatty():
        need("huggingface_hub.utils").disable_progress_bars()
    quietly("upload to", options.name,
            lambda: api.create_repo(options.name, private=options.private or None, exist_ok=True))
    quietly("upload to", options.name,
            lambda: api.upload_folder(repo_id=options.name, folder_path=options.dir, allow_patterns=FILES,
                                      commit_message=options.message))
    print(masked(f"{options.dir}: is {api.endpoint}/{options.name} now; load it with -e hub:{options.name}"))


if __name__ == "__main__":
    sys.exit(run(main))
