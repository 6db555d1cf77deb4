#!/usr/bin/env python3
"""A local server that speaks the protocol of the Hugging Face Hub, as far as uploads and downloads of models need it.

    hub_server.py FOLDER        prints its address, then serves until it is killed

Repositories lie in FOLDER/NAME, one file each, and FOLDER/.objects has the large files by their SHA-256. Whoever writes must
send the token "local". FOLDER/.requests lists what was asked for. Where FOLDER/.fail exists, the next request whose method
and path match its text, a regular expression, gets status 500, and the file is removed.
"""
import base64
import hashlib
import http.server
import json
import os
import re
import sys
import urllib.parse

ROOT = os.path.realpath(sys.argv[1])
OBJECTS = os.path.join(ROOT, ".objects")
NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
os.makedirs(OBJECTS, exist_ok=True)


def commit_of(name):
    """A hash of all files of a repository, in place of git's."""
    digest = hashlib.sha1(name.encode())
    for path in files_of(name):
        with open(os.path.join(ROOT, name, path), "rb") as f:
            digest.update(path.encode() + b"\0" + f.read())
    return digest.hexdigest()


def files_of(name):
    top = os.path.join(ROOT, name)
    return sorted(os.path.relpath(os.path.join(d, f), top) for d, _, files in os.walk(top) for f in files)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code, message):
        self.answer(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)

    def handle_request(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        with open(os.path.join(ROOT, ".requests"), "a") as f:
            print(self.command, path, file=f)
        fail = os.path.join(ROOT, ".fail")
        if os.path.exists(fail) and re.search(open(fail).read().strip(), f"{self.command} {path}"):
            os.remove(fail)
            return self.refuse(500, "", "the test's own failure")
        writes = self.command in ("POST", "PUT") and "paths-info" not in path
        if writes and "/.objects/" not in path and self.headers.get("Authorization") != "Bearer local":
            return self.refuse(401, "", "Invalid username or password.")
        for method, pattern, answer in ROUTES:
            found = re.fullmatch(pattern, path)
            if method == self.command.replace("HEAD", "GET") and found:
                name = found.groupdict().get("name")
                if name and not os.path.isdir(os.path.join(ROOT, name)):
                    return self.refuse(404 if not writes else 401, "RepoNotFound", "Repository not found")
                return answer(self, **found.groupdict())
        return self.refuse(404, "", f"{path}: this server has no such address")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def url(self, path):
        return f"http://{self.headers['Host']}/{path}"

    # What the routes do

    def create(self):
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or 'user'}/{wanted['name'].split('/')[-1]}"
        there = os.path.isdir(os.path.join(ROOT, name))
        os.makedirs(os.path.join(ROOT, name), exist_ok=True)
        self.answer(409 if there else 200, {"url": self.url(name), "name": name, "id": name})

    def validate(self):
        content = json.loads(self.body)["content"]
        good = re.match(r"---\n(\w+: .*\n)+---\n", content)
        self.answer(200, {"errors": [] if good else [{"message": "no front matter"}], "warnings": []})

    def info(self, name, revision="main"):
        if revision not in ("main", commit_of(name)):
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        siblings = [{"rfilename": path} for path in files_of(name)]
        return self.answer(200, {"id": name, "modelId": name, "sha": commit_of(name), "siblings": siblings,
                                 "private": False, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, name, revision):
        self.answer(200, [self.entry(name, path) for path in files_of(name)])

    def entry(self, name, path):
        with open(os.path.join(ROOT, name, path), "rb") as f:
            data = f.read()
        return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def paths(self, name, revision):
        wanted = urllib.parse.parse_qs(self.body.decode()).get("paths", [])
        if self.body[:1] == b"{":
            wanted = json.loads(self.body)["paths"]
        self.answer(200, [self.entry(name, path) for path in files_of(name) if path in wanted])

    def preupload(self, name, revision):
        files = [{"path": f["path"], "shouldIgnore": False,
                  "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                 for f in json.loads(self.body)["files"]]
        self.answer(200, {"files": files})

    def batch(self, name):
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            there = os.path.exists(os.path.join(OBJECTS, wanted["oid"]))
            upload = {"upload": {"href": self.url(".objects/" + wanted["oid"]), "header": {}}}
            objects.append({**wanted, **({} if there else {"actions": upload})})
        self.answer(200, {"transfer": "basic", "objects": objects})

    def put(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.refuse(400, "", "the bytes do not have this hash")
        with open(os.path.join(OBJECTS, oid), "wb") as f:
            f.write(self.body)
        return self.answer(200)

    def commit(self, name, revision):
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                continue
            path = os.path.realpath(os.path.join(ROOT, name, value["path"]))
            if not path.startswith(os.path.join(ROOT, name, "")):
                return self.refuse(400, "", "a path that leads elsewhere")
            if line["key"] == "file":
                data = base64.b64decode(value["content"])
            else:
                with open(os.path.join(OBJECTS, value["oid"]), "rb") as f:
                    data = f.read()
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as f:
                f.write(data)
        return self.answer(200, {"success": True, "commitOid": commit_of(name), "hookOutput": "",
                                 "commitUrl": self.url(f"{name}/commit/{commit_of(name)}")})

    def resolve(self, name, revision, path):
        if revision not in ("main", commit_of(name)):
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if path not in files_of(name):
            return self.refuse(404, "EntryNotFound", "Entry not found")
        with open(os.path.join(ROOT, name, path), "rb") as f:
            data = f.read()
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(start.group(1)) if start else 0
        return self.answer(206 if start else 200, data[start:], X_Repo_Commit=commit_of(name),
                           ETag=f'"{hashlib.sha256(data).hexdigest()}"', Content_Length=str(len(data) - start))


API = f"/api/models/{NAME}"
ROUTES = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("GET", API, Handler.info),
    ("GET", API + "/revision/(?P<revision>[^/]+)", Handler.info),
    ("GET", API + "/tree/(?P<revision>[^/]+)", Handler.tree),
    ("POST", API + "/paths-info/(?P<revision>[^/]+)", Handler.paths),
    ("POST", API + "/preupload/(?P<revision>[^/]+)", Handler.preupload),
    ("POST", API + "/commit/(?P<revision>[^/]+)", Handler.commit),
    ("POST", f"/{NAME}.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/.objects/(?P<oid>[0-9a-f]{64})", Handler.put),
    ("GET", f"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
]

if __name__ == "__main__":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
