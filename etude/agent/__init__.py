"""`etude agent`: a harness session in the terminal, on the user's own directory.

The directory is copied into a pod, the model works there with the tools and prompt of `harness`, and the files that
differ are shown and applied on request. Sessions are saved after every answer and can be resumed. Nothing outside the
directory and the session store is written. Importing this package loads no torch; the names below load on first use.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.agent.changes import find_changes as find_changes
    from etude.agent.changes import format_patch as format_patch
    from etude.agent.conversation import AgentConversation as AgentConversation
    from etude.agent.conversation import open_conversation as open_conversation
    from etude.agent.options import AgentOptions as AgentOptions
    from etude.agent.upload import open_workspace as open_workspace

__getattr__ = lazy_exports(__name__)
