"""Settings of these tests: annotations are checked, no deadlines on shared machines, an import path for the helpers."""

from hypothesis import settings
from jaxtyping import install_import_hook

# Without effect on modules that other tests imported before; then their annotations go unchecked this time.
install_import_hook("opdcheck.mismatch", "beartype.beartype")

settings.register_profile("opdcheck", deadline=None, max_examples=60)
settings.load_profile("opdcheck")
