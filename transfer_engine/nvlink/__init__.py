"""Memory that the GPUs of an NVLink domain reach directly. Nothing here yet."""
