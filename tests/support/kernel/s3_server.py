"""A real S3 server in a process of its own: moto's application, one request at a time.

Its own command answers requests in threads, and there a condition is looked at and the object
written in two steps that nothing holds together. A storage decides conditional writes one after
the other, and so does this.

    python s3_server.py      prints the port it listens on, and serves until killed
"""

from __future__ import annotations

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


def main() -> None:
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=False)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
