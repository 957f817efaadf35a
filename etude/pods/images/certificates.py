"""The certificate bundle that programs in a pod with egress trust: that of this machine, and the image's own.

A pod of this machine's programs has the machine's bundle in its image. Any other pod gets a file with the certificates
of both in its /dev, which is in no layer, so that images, snapshots and diffs do not contain it. Environment variables
name the bundle; variables of the image win.
"""

import os
import re

from etude.errors import InputError
from etude.pods.images.records import Image
from etude.pods.pod import PodError

# Where distributions keep their bundle.
BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem")
IMAGE_BUNDLES = (*BUNDLES, "/etc/ssl/cert.pem")
POD_BUNDLE = "/dev/ca-certificates.crt"
MAX_BUNDLE = 3 << 20  # bytes; the pod's /dev has 4 MiB
# Read by OpenSSL and Python; requests; pip; node and npm; git; curl. pip and node have bundles of their own otherwise.
CERTIFICATE_VARIABLES = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "CURL_CA_BUNDLE"),
)
CERTIFICATES_OPTION = "ETUDE_POD_CERTIFICATES"  # another file below /etc/ssl or /etc/pki, or "none"
_CERTIFICATE = re.compile(rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----.+?-----END (?:TRUSTED )?CERTIFICATE-----", re.S)


def host_bundle() -> str:
    """Return the path of this machine's bundle, or the one that the option names; empty for none."""
    given = os.environ.get(CERTIFICATES_OPTION, "")
    if given == "none":
        return ""
    if given and not (given.startswith(("/etc/ssl/", "/etc/pki/")) and os.path.isfile(given)):
        raise InputError(f"{CERTIFICATES_OPTION}={given}: expected none, or a file below /etc/ssl or /etc/pki")
    return given or next(filter(os.path.isfile, BUNDLES), "")


def certificate_variables(image: Image) -> dict[str, str]:
    """Return the variables with which programs in a pod of an image trust this machine's bundle, too."""
    bundle = host_bundle()
    return dict.fromkeys(CERTIFICATE_VARIABLES, bundle if image.binds else POD_BUNDLE) if bundle else {}


def merge_bundles(of_image: bytes, of_host: bytes) -> bytes:
    """Return a bundle with the certificates of both, each once."""
    found: dict[bytes, bytes] = {}
    for certificate in _CERTIFICATE.findall(of_image + b"\n" + of_host):
        found.setdefault(b"".join(certificate.split()), certificate)
    merged = b"\n".join([*found.values(), b""])
    if len(merged) > MAX_BUNDLE:
        raise PodError(
            f"the certificate bundles of this machine and the image have {len(merged):,} bytes, over {MAX_BUNDLE:,}; "
            f"set {CERTIFICATES_OPTION} to a smaller file, or to none"
        )
    return merged
