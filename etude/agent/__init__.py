"""`etude agent`: a harness session in the terminal, on the user's own directory.

The directory is copied into a pod, the model works there with the tools and prompt of `harness`, and the files that
differ are shown and applied on request. Sessions are saved after every answer and can be resumed. Nothing outside the
directory and the session store is written. Importing this package loads no torch; the names below load on first use.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.agent.apply import ApplyResult as ApplyResult
    from etude.agent.apply import apply_changes as apply_changes
    from etude.agent.conversation import AgentConversation as AgentConversation
    from etude.agent.conversation import open_conversation as open_conversation
    from etude.agent.diff import FileDiff as FileDiff
    from etude.agent.diff import find_changes as find_changes
    from etude.agent.diff import format_patch as format_patch
    from etude.agent.manifest import FileManifest as FileManifest
    from etude.agent.manifest import ManifestEntry as ManifestEntry
    from etude.agent.options import AgentOptions as AgentOptions
    from etude.agent.upload import upload_directory as upload_directory

__getattr__ = lazy_exports(__name__)
