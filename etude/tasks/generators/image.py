"""The Python base image of generated tasks: the host's Python without /opt.

Hosts keep package mirrors and caches in /opt, which can contain the very sources that a task is about.
"""

from etude.pods.fleet import Fleet
from etude.tasks.base_images import HostSettings, host_python, python_image

EXCLUDED_BINDS = ("/opt",)


async def prepare_base_image(fleet: Fleet) -> HostSettings:
    """Return host settings under which `FROM python` excludes /opt; the image is added to the store if missing."""
    if fleet.local is None:
        return HostSettings()
    image = await python_image(fleet)
    binds = tuple(path for path in image.binds if path not in EXCLUDED_BINDS)
    if binds == image.binds:
        return HostSettings()
    name = f"{image.name}-sealed"
    fleet.local.store.add_image(image.with_(binds=binds).named(name))
    return HostSettings(images={f"python:{host_python()}": name})
