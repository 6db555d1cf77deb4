#!/usr/bin/env python3
"""A server on this machine that stands in for the net, for dev/test/net_data.sh.

    net_server.py FOLDER PORT_FILE

FOLDER/files/NAME is served as /NAME. FOLDER/hub/OWNER/REPOSITORY/ is a data set of a hub: as much of the Hugging Face hub's
interface as reading a public data set takes, for libraries whose HF_ENDPOINT is this server. The port, which the system
chooses, is written to PORT_FILE. Faults, by files in FOLDER: `cut` holds a number of bytes after which the connections of
files end, though more was announced; `commit` the commit of every data set. What was asked for is listed in FOLDER/requests.
"""
import http.server
import json
import os
import posixpath
import re
import sys
import urllib.parse

FOLDER, PORT_FILE = sys.argv[1:]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def setting(name):
    try:
        with open(os.path.join(FOLDER, name), encoding="utf-8") as f:
            return f.read().strip()
    except FileNotFoundError:
        return None


def described(root, path):
    """A file or folder of a data set, as the hub's trees list it."""
    full = os.path.join(root, path)
    if os.path.isdir(full):
        return {"type": "directory", "oid": "0" * 40, "size": 0, "path": path}
    return {"type": "file", "oid": f"{os.path.getsize(full):040x}", "size": os.path.getsize(full), "path": path}


def below(root, path=""):
    for folder, folders, files in os.walk(os.path.join(root, path)):
        for name in sorted(folders + files):
            yield posixpath.relpath(os.path.join(folder, name), root)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body, headers=()):
        if status == 404:
            headers = [("X-Error-Code", "EntryNotFound")]
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode(), [("Content-Type", "application/json")])

    def answer_file(self, path, headers=()):
        if not os.path.isfile(path):
            return self.answer(404, b"")
        with open(path, "rb") as f:
            data = f.read()
        total, status, headers = (
            len(data),
            200,
            list(headers) + [("ETag", f'"{len(data):040x}"'), ("Accept-Ranges", "bytes")],
        )
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or total - 1), total - 1)
            data, status = data[first : last + 1], 206
            headers.append(("Content-Range", f"bytes {first}-{last}/{total}"))
        cut = setting("cut")
        if cut is None or self.command == "HEAD":
            return self.answer(status, data, headers)
        self.send_response(status)
        for name, value in headers + [("Content-Length", str(len(data)))]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: int(cut)])
        self.close_connection = True

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(address.path)
        hub = os.path.join(FOLDER, "hub")
        commit = setting("commit") or COMMIT
        with open(os.path.join(FOLDER, "requests"), "a", encoding="utf-8") as f:
            f.write(f"{self.command} {path}\n")
        api = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?", path)
        resolved = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        root = os.path.join(hub, api[1]) if api else None
        if resolved:
            self.answer_file(os.path.join(hub, resolved[1], resolved[3]), [("X-Repo-Commit", commit)])
        elif api and not os.path.isdir(root):
            self.answer(404, b"")
        elif api and api[2] in (None, "revision"):
            siblings = [{"rfilename": p} for p in below(root) if os.path.isfile(os.path.join(root, p))]
            information = {"id": api[1], "sha": commit, "private": False, "gated": False, "disabled": False, "tags": []}
            self.answer_json({**information, "siblings": siblings, "downloads": 0, "likes": 0})
        elif api and api[2] == "tree":
            if not os.path.isdir(os.path.join(root, api[4])):
                return self.answer(404, b"")
            found = list(below(root, api[4]))
            if "recursive=true" not in address.query.lower():
                found = [p for p in found if posixpath.dirname(p) == api[4].rstrip("/")]
            self.answer_json([described(root, p) for p in found])
        elif api:
            try:
                paths = json.loads(body)["paths"]
            except ValueError:
                paths = urllib.parse.parse_qs(body.decode()).get("paths", [])
            self.answer_json([described(root, p) for p in paths if os.path.exists(os.path.join(root, p))])
        elif "/.." not in path:
            self.answer_file(os.path.join(FOLDER, "files", path.lstrip("/")))

    do_HEAD = do_POST = do_GET


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
with open(PORT_FILE + ".tmp", "w", encoding="utf-8") as f:
    f.write(str(server.server_address[1]))
os.replace(PORT_FILE + ".tmp", PORT_FILE)
server.serve_forever()
