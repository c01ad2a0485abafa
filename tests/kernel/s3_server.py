"""A real S3 server in a process of its own: moto's application, one request at a time.

Its own command answers requests in threads and looks at a condition before it takes the lock for
writing, so that two conditional writers can both win. Amazon's storage decides them one after
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
