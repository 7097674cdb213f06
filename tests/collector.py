"""A collector of traces for tests: receives OTLP over HTTP on loopback, and keeps the spans."""

import contextlib
import gzip
import threading
from http import server

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from waiting import PATIENT_S


class Collector:
    """The received spans."""

    def __init__(self, port):
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self.spans = []
        self.services = set()
        self._came = threading.Condition()

    def take(self, body):
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        with self._came:
            for group in request.resource_spans:
                names = {a.key: a.value.string_value for a in group.resource.attributes}
                self.services.add(names["service.name"])
                for scope in group.scope_spans:
                    self.spans += scope.spans
            self._came.notify_all()

    def await_names(self, *names, within_s=PATIENT_S):
        """Wait until spans of these names have arrived, and return them by name."""
        with self._came:
            assert self._came.wait_for(lambda: set(names) <= self.names, within_s), self.names
        return {span.name: span for span in self.spans}

    @property
    def names(self):
        return {span.name for span in self.spans}


@contextlib.contextmanager
def running():
    """Run a collector until the end of the block."""

    class Handler(server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            found.take(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            """Quiet."""

    listening = server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(listening.server_port)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def attributes(span):
    """Return the attributes of a span as plain values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
