"""The Python base image of generated tasks: the host's Python without /opt.

Hosts keep package mirrors and caches in /opt, which can contain the very sources that a task is about.
"""

from etude.errors import InputError
from etude.pods.fleet import Fleet
from etude.pods.host_system import host_system
from etude.tasks.base_images import HostSettings, python_image

EXCLUDED_BINDS = ("/opt",)


async def prepare_base_image(fleet: Fleet) -> HostSettings:
    """Return host settings under which `FROM python` excludes /opt; the image is built if it does not exist.

    Packages are chosen here for the Python with which the tests run, so pod hosts must have the one of this machine.
    """
    python = host_system().python
    if fleet.system.python != python:
        raise InputError(
            f"the pod hosts have {fleet.system}, this machine has {host_system()}; tasks are made where both have the "
            "same Python"
        )
    image = await python_image(fleet)
    binds = tuple(path for path in image.binds if path not in EXCLUDED_BINDS)
    if binds == image.binds:
        return HostSettings()
    name = f"{image.name}-sealed"
    fleet.name_image(image.with_(binds=binds).named(name))
    return HostSettings(images={f"python:{python}": name})
