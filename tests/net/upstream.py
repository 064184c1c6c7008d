"""A server of the outside world, for what programs inside a session talk to: plain or TLS, on a free port of loopback.

usage: upstream.py DIR [CERTIFICATE KEY]

Prints its port, then serves until its standard input ends:

  /hello               a line
  /echo                method, path, headers and body as JSON
  /bytes/N             N bytes
  /slow                a line now, another one once /release was asked for
  /never               nothing, ever
  /reset               half an answer, then a reset
  /redirect?URL        302
  /events              three server-sent events, the next once the one before was read (by /events/next)
  /ws                  WebSocket that echoes
  /v1/messages         a model: 401 without its key, else a stream of events that goes on once /release was asked for
  /git/…               git over HTTP on DIR/git (needs `x-access-token:KEY` to push)
  /files/…             files of DIR/files: an index for pip and a registry for npm are made of these
"""

import base64, hashlib, http.server, json, os, socket, ssl, struct, subprocess, sys, threading, urllib.parse

ROOT = sys.argv[1]
RELEASE = threading.Event()
KEY = os.environ.get("UPSTREAM_KEY", "")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def body(self):
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status, body, kind="text/plain", more=()):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in more:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def stream(self, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def handle_any(self):
        path, _, query = self.path.partition("?")
        if path == "/hello":
            return self.answer(200, b"hello from outside\n")
        if path == "/echo":
            body = self.body()
            told = {"method": self.command, "path": self.path, "headers": {k.lower(): v for k, v in self.headers.items()},
                    "body": body.decode("utf-8", "replace"), "length": len(body)}
            return self.answer(200, json.dumps(told).encode(), "application/json")
        if path.startswith("/bytes/"):
            left = int(path.split("/")[2])
            self.send_response(200)
            self.send_header("Content-Length", str(left))
            self.end_headers()
            piece = b"x" * 65536
            while left > 0:
                self.wfile.write(piece[:left])
                left -= len(piece)
            return
        if path == "/release":
            RELEASE.set()
            return self.answer(200, b"released\n")
        if path == "/hold":
            RELEASE.clear()
            return self.answer(200, b"held\n")
        if path == "/slow":
            self.stream("text/plain")
            self.chunk(b"first\n")
            RELEASE.wait()
            self.chunk(b"second\n")
            return self.chunk(b"")
        if path == "/never":
            self.close_connection = True
            return self.rfile.read()
        if path == "/reset":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if path == "/redirect":
            return self.answer(302, b"", more=[("Location", urllib.parse.unquote(query))])
        if path == "/events":
            self.stream("text/event-stream")
            for n in range(3):
                self.chunk(b"id: %d\ndata: event %d\n\n" % (n, n))
                if n == 0:
                    # The rest comes once the first was read: an answer that is held back never ends.
                    RELEASE.wait()
            return self.chunk(b"")
        if path == "/ws":
            return self.websocket()
        if path == "/v1/messages":
            return self.model()
        if path.startswith("/git/"):
            return self.git(path, query)
        if path.startswith("/files/"):
            return self.file(path)
        self.answer(404, b"no such page\n")

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = handle_any

    def model(self):
        self.body()
        if self.headers.get("x-api-key") != KEY:
            return self.answer(401, b'{"error":"no key"}', "application/json")
        self.stream("text/event-stream")
        self.chunk(b"data: thinking\n\n")
        RELEASE.wait()
        self.chunk(b"data: done\n\n")
        self.chunk(b"")

    def websocket(self):
        accept = hashlib.sha1((self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(accept).decode())
        self.end_headers()
        self.close_connection = True
        while True:
            head = self.rfile.read(2)
            if len(head) < 2 or head[0] & 15 == 8:
                return
            length = head[1] & 127
            if length == 126:
                length = struct.unpack(">H", self.rfile.read(2))[0]
            mask = self.rfile.read(4)
            data = bytes(b ^ mask[n % 4] for n, b in enumerate(self.rfile.read(length)))
            size = bytes([length]) if length < 126 else b"\x7e" + struct.pack(">H", length)
            self.wfile.write(bytes([head[0]]) + size + data)
            self.wfile.flush()

    def git(self, path, query):
        given = self.headers.get("Authorization", "")
        expected = "Basic " + base64.b64encode(f"x-access-token:{KEY}".encode()).decode()
        if KEY and given != expected:
            return self.answer(401, b"who are you?\n", more=[("WWW-Authenticate", 'Basic realm="git"')])
        env = dict(os.environ, GIT_PROJECT_ROOT=f"{ROOT}/git", GIT_HTTP_EXPORT_ALL="1", PATH_INFO=path[len("/git"):],
                   QUERY_STRING=query, REQUEST_METHOD=self.command, CONTENT_TYPE=self.headers.get("Content-Type", ""),
                   HTTP_CONTENT_ENCODING=self.headers.get("Content-Encoding", ""), REMOTE_USER="tester", REMOTE_ADDR="127.0.0.1",
                   GIT_PROTOCOL=self.headers.get("Git-Protocol", ""))
        body = self.body()
        env["CONTENT_LENGTH"] = str(len(body))
        out = subprocess.run(["git", "http-backend"], input=body, env=env, stdout=subprocess.PIPE, check=True).stdout
        head, _, content = out.partition(b"\r\n\r\n")
        fields = [line.split(": ", 1) for line in head.decode().split("\r\n")]
        status = next((int(value.split()[0]) for name, value in fields if name == "Status"), 200)
        kind = next((value for name, value in fields if name == "Content-Type"), "text/plain")
        self.answer(status, content, kind)

    def file(self, path):
        name = os.path.normpath(os.path.join(ROOT, urllib.parse.unquote(path).lstrip("/")))
        if os.path.isdir(name):
            links = "".join(f'<a href="{n}">{n}</a>\n' for n in sorted(os.listdir(name)))
            return self.answer(200, links.encode(), "text/html")
        if not os.path.isfile(name):
            return self.answer(404, b"no such file\n")
        with open(name, "rb") as file:
            data = file.read()
        # A registry's page names itself.
        data = data.replace(b"@HOST@", self.headers["Host"].encode())
        self.answer(200, data, "application/json" if name.endswith(".json") or "npm" in path and not name.endswith(".tgz") else "application/octet-stream")


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def get_request(self):
        connection, address = super().get_request()
        return connection, address

    def finish_request(self, request, address):
        if len(sys.argv) > 2:
            request = CONTEXT.wrap_socket(request, server_side=True)
        super().finish_request(request, address)

    def handle_error(self, request, address):
        pass


if len(sys.argv) > 2:
    CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    CONTEXT.load_cert_chain(sys.argv[2], sys.argv[3])
server = Server(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
