"""A server on this machine that stands in for the net: files, and as much of the Hugging Face hub's interface as
reading and writing public models and reading public data sets take, for libraries whose HF_ENDPOINT is its address.

    with Hub(folder) as hub: ...

FOLDER/OWNER/NAME is a repository, of models or of data. Whoever writes must send the token "local". hub.requests lists
what was asked for. The next request that matches hub.fails gets status 500.
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


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        if not isinstance(body, bytes):
            body, headers = json.dumps(body).encode(), {**headers, "Content_Type": "application/json"}
        self.send_response(status)
        for key, value in {"Content_Length": len(body), **headers}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status, code, message):
        self.answer(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)

    def handle_request(self):
        self.hub, self.body = self.server.hub, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        request = f"{self.command} {path}"
        self.hub.requests.append(request)
        if self.hub.fails and re.search(self.hub.fails, request):
            self.hub.fails = None
            return self.refuse(500, "", "the test's own failure")
        writes = self.command in ("POST", "PUT")
        if writes and "/objects/" not in path and self.headers.get("Authorization") != "Bearer local":
            return self.refuse(401, "", "Invalid username or password.")
        for method, pattern, answer in ROUTES:
            found = re.fullmatch(pattern, path)
            if method == self.command.replace("HEAD", "GET") and found:
                values = found.groupdict()
                if "name" in values and not os.path.isdir(self.folder(values["name"])):
                    return self.refuse(401 if writes else 404, "RepoNotFound", "Repository not found")
                if values.get("revision") not in (None, "main", *self.commits(values.get("name"))):
                    return self.refuse(404, "RevisionNotFound", "Invalid rev id")
                return answer(self, **values)
        return self.refuse(404, "", f"{path}: this server has no such address")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    # Repositories

    def folder(self, name):
        return os.path.join(self.hub.folder, name)

    def commits(self, name):
        """Those that were announced, and hashes of all files of the repository in place of git's."""
        if name:
            files = sorted(contents(self.folder(name)).items())
            self.commit_id = hashlib.sha1(repr(files).encode()).hexdigest()
            self.hub.commits.add(self.commit_id)
        return self.hub.commits

    def url(self, path):
        return f"{self.hub.address}/{path}"

    # What the routes do

    def create(self):
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or 'user'}/{wanted['name'].split('/')[-1]}"
        status = 409 if os.path.isdir(self.folder(name)) else 200
        os.makedirs(self.folder(name), exist_ok=True)
        self.answer(status, {"url": self.url(name), "name": name, "id": name})

    def validate(self):
        good = re.match(r"---\n(\w+: .*\n)+---\n", json.loads(self.body)["content"])
        self.answer(200, {"errors": [] if good else [{"message": "no front matter"}], "warnings": []})

    def info(self, name, revision=None):
        files = [{"rfilename": path} for path in sorted(contents(self.folder(name)))]
        sha = self.commit_id if revision in (None, "main") else revision
        self.answer(200, {"id": name, "sha": sha, "siblings": files, "private": False, "tags": []})

    def tree(self, name, revision, below=""):
        """Files and folders, as the hub lists them."""
        below, found = below and below + "/", contents(self.folder(name))
        folders = {path[:i] for path in found for i in range(len(path)) if path[i] == "/"}
        listed = {path: {"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in folders}
        for path, data in found.items():
            listed[path] = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        listed = [listed[path] for path in sorted(listed) if path.startswith(below)]
        if below and not listed:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        is_deep = "recursive=true" in self.path.lower()
        return self.answer(200, [entry for entry in listed if is_deep or "/" not in entry["path"][len(below) :]])

    def preupload(self, name, revision):
        modes = {True: "lfs", False: "regular"}
        self.answer(200, {"files": [{"path": f["path"], "shouldIgnore": False,
                                     "uploadMode": modes[f["path"].endswith(".safetensors")]}
                                    for f in json.loads(self.body)["files"]]})

    def batch(self, name):
        def described(wanted):
            upload = {"upload": {"href": self.url("objects/" + wanted["oid"]), "header": {}}}
            return {**wanted, **({} if wanted["oid"] in self.hub.objects else {"actions": upload})}

        self.answer(200, {"transfer": "basic", "objects": list(map(described, json.loads(self.body)["objects"]))})

    def put(self, oid):
        self.hub.objects[oid] = self.body
        return self.answer(200)

    def commit(self, name, revision):
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] != "header":
                is_file = line["key"] == "file"
                data = base64.b64decode(value["content"]) if is_file else self.hub.objects[value["oid"]]
                write(os.path.join(self.folder(name), value["path"]), data)
        self.commits(name)
        self.answer(200, {"success": True, "commitOid": self.commit_id, "hookOutput": "",
                          "commitUrl": self.url(f"{name}/commit/{self.commit_id}")})

    def resolve(self, path, name, revision):
        full = os.path.join(self.folder(name), path)
        if not os.path.isfile(full):
            return self.refuse(404, "EntryNotFound", "Entry not found")
        data = read(full, "rb")
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept_Ranges": "bytes"}
        headers["X_Repo_Commit"] = self.commit_id
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            return self.answer(200, data, **headers)
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
        return self.answer(206, data[first : last + 1], **headers)


NAME, REVISION = r"(?P<name>[\w.-]+/[\w.-]+)", "(?P<revision>[^/]+)"
API = f"/api/(?:models|datasets)/{NAME}"
ROUTES = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("GET", API, Handler.info),
    ("GET", f"{API}/revision/{REVISION}", Handler.info),
    ("GET", f"{API}/tree/{REVISION}/?(?P<below>.*)", Handler.tree),
    ("POST", f"{API}/preupload/{REVISION}", Handler.preupload),
    ("POST", f"{API}/commit/{REVISION}", Handler.commit),
    ("POST", f"/{NAME}.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/objects/(?P<oid>[0-9a-f]{64})", Handler.put),
    ("GET", f"/(?:datasets/)?{NAME}/resolve/{REVISION}/(?P<path>.+)", Handler.resolve),
]


class Hub:
    def __init__(self, folder):
        self.folder, self.requests, self.commits, self.objects = folder, [], set(), {}
        self.fails = None

    def __enter__(self):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads, self.server.hub = True, self
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
