"""A server on this machine that stands in for the Hugging Face hub, as far as reading and writing public models and
reading public data sets need it, for libraries whose HF_ENDPOINT is its address.

    with Hub(folder) as hub: ...

FOLDER/OWNER/NAME is a repository, of models or of data. Whoever writes must send the token "local".
"""
import base64
import hashlib
import http.server
import json
import os
import re
import threading
import urllib.parse

from verdicts import contents, read, write

ADDRESS = re.compile(r"(?:/api/models|/api/datasets|/datasets)?/([\w.-]+/[\w.-]+)"
                     r"(?:/(revision|tree|preupload|commit|resolve)/([^/]+)/?(.*))?")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body, status=200, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content_Length": len(data), "Content_Type": "application/json", **headers}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status, code):
        self.answer({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def handle_request(self):
        hub, body = self.server, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if self.command == "POST" and self.headers.get("Authorization") != "Bearer local":
            return self.refuse(401, "")
        if path == "/api/validate-yaml":
            return self.answer({})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            os.makedirs(os.path.join(hub.folder, name), exist_ok=True)
            return self.answer({"url": f"{hub.address}/{name}"})
        name, what, revision, path = ADDRESS.fullmatch(path).groups()
        folder = os.path.join(hub.folder, name)
        if not os.path.isdir(folder):
            return self.refuse(404, "RepoNotFound")
        self.commit = hashlib.sha1(repr(sorted(contents(folder).items())).encode()).hexdigest()
        if what == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            return self.answer({"files": [{"path": p, "shouldIgnore": False, "uploadMode": "regular"} for p in paths]})
        if what == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    write(os.path.join(folder, line["value"]["path"]), base64.b64decode(line["value"]["content"]))
            return self.answer({"commitOid": self.commit, "commitUrl": f"{hub.address}/{name}/commit/{self.commit}"})
        if what == "tree":
            return self.list(folder, path)
        if what == "resolve":
            return self.send(os.path.join(folder, path))
        sha = self.commit if revision in (None, "main") else revision
        return self.answer({"id": name, "sha": sha, "siblings": [{"rfilename": f} for f in contents(folder)]})

    do_GET = do_HEAD = do_POST = handle_request

    def list(self, folder, below):
        entries = []
        for at, folders, files in os.walk(os.path.join(folder, below)):
            for name in folders + files:
                full = os.path.join(at, name)
                entries.append({"type": "file" if name in files else "directory", "path": os.path.relpath(full, folder),
                                "size": os.path.getsize(full), "oid": "0" * 40})
        self.answer(entries)

    def send(self, full):
        if not os.path.isfile(full):
            return self.refuse(404, "EntryNotFound")
        data = read(full, "rb")
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X_Repo_Commit": self.commit}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            return self.answer(data, **headers)
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
        return self.answer(data[first : last + 1], 206, **headers)


class Hub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
