"""The Python image of generated tasks: the machine's programs without what it keeps beside them.

/opt is where machines keep mirrors and caches of packages, and those have the very sources that a task is about.
"""

from etude.pods.fleet import Fleet
from etude.tasks.base_images import Provision, host_python, python_image

KEPT_OUT = ("/opt",)


async def sealed_base(fleet: Fleet) -> Provision:
    """What to give to tasks so that `FROM python` has nothing of /opt; made once, kept in the store."""
    if fleet.local is None:
        return Provision()
    image = await python_image(fleet)
    left = tuple(path for path in image.binds if path not in KEPT_OUT)
    if left == image.binds:
        return Provision()
    name = f"{image.name}-sealed"
    fleet.local.store.add_image(image.with_(binds=left).named(name))
    return Provision(images={f"python:{host_python()}": name})
