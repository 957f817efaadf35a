"""How mined commits are installed: by stage 0 of the installer, as of the date of the commit."""

from pathlib import Path

from etude.pods.fleet import Fleet
from etude.tasks.base_images import HostSettings
from etude.tasks.generators.image import EXCLUDED_BINDS, prepare_base_image
from etude.tasks.installation.installer import install
from etude.tasks.installation.result import Installation
from etude.tasks.installation.setup_pod import InstallOptions
from etude.tasks.installation.snapshot import RepositorySnapshot
from etude.tasks.mining.environments import Installer

SEALED_HOST = "host-sealed"


def default_installer(options: InstallOptions) -> Installer:
    """Return the installer of parent states. Mining runs all tests six times itself, so one run verifies the set-up."""

    async def install_parent(fleet: Fleet, snapshot: RepositorySnapshot) -> Installation:
        return await install(fleet, snapshot, options)

    return install_parent


def install_options(
    maps: dict[str, str], allow: tuple[str, ...], index_url: str = "", cache: Path | None = None
) -> InstallOptions:
    """Return the options of the installer for mined commits. Tasks start from an image whose system is read-only."""
    return InstallOptions(
        images=maps,
        allow=allow,
        index_url=index_url,
        cache=cache,
        reruns=1,
        min_passing=0.5,
        system_packages=False,
    )


async def mining_host_settings(fleet: Fleet, maps: dict[str, str]) -> HostSettings:
    """Return host settings under which environments of tasks exclude /opt, where mirrors of package indexes are."""
    host = await fleet.resolve("host")
    binds = tuple(path for path in host.binds if path not in EXCLUDED_BINDS)
    sealed = {}
    if binds != host.binds:
        fleet.name_image(host.with_(binds=binds).named(SEALED_HOST))
        sealed["host"] = SEALED_HOST
    python = (await prepare_base_image(fleet)).images
    return HostSettings(images={**sealed, **python, **maps})
