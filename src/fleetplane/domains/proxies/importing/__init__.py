"""An existing NGINX configuration as typed hosts and upstreams."""
