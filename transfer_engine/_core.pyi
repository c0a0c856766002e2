# The compiled core: cffi's view of native/te.h. Both objects are untyped by nature; _native.py is their only user.
from typing import Any

ffi: Any
lib: Any
