"""`etude agent`: a harness session in the terminal, on the user's own directory.

The directory is copied into a pod, the model works there with the tools and prompt of `harness`, and the files that
differ are shown and applied on request. Sessions are saved after every answer and can be resumed. Nothing outside the
directory and the session store is written. Importing this package loads no torch; the names below load on first use.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.agent.apply import ApplyResult, apply_changes
    from etude.agent.conversation import AgentConversation, open_conversation
    from etude.agent.diff import FileDiff, find_changes, format_patch
    from etude.agent.manifest import FileManifest, ManifestEntry
    from etude.agent.options import AgentOptions
    from etude.agent.upload import upload_directory

_MODULES = {  # imported when first used
    "AgentConversation": "etude.agent.conversation",
    "AgentOptions": "etude.agent.options",
    "ApplyResult": "etude.agent.apply",
    "FileDiff": "etude.agent.diff",
    "FileManifest": "etude.agent.manifest",
    "ManifestEntry": "etude.agent.manifest",
    "apply_changes": "etude.agent.apply",
    "find_changes": "etude.agent.diff",
    "format_patch": "etude.agent.diff",
    "open_conversation": "etude.agent.conversation",
    "upload_directory": "etude.agent.upload",
}
__all__ = [
    "AgentConversation",
    "AgentOptions",
    "ApplyResult",
    "FileDiff",
    "FileManifest",
    "ManifestEntry",
    "apply_changes",
    "find_changes",
    "format_patch",
    "open_conversation",
    "upload_directory",
]
__getattr__ = lazy_exports(__name__, _MODULES)
