"""What to install when tests fail for a missing module, plugin or fixture. Pure functions over the output of a run."""

import re
import sys
from collections.abc import Collection, Mapping


def _table(text: str) -> Mapping[str, str]:
    """Return the table that a text of NAME=VALUE words describes."""
    return dict(word.split("=", 1) for word in text.split())


# Distributions that provide a module of another name.
DISTRIBUTIONS = _table(
    """
    yaml=PyYAML PIL=Pillow cv2=opencv-python-headless sklearn=scikit-learn bs4=beautifulsoup4
    dateutil=python-dateutil attr=attrs OpenSSL=pyOpenSSL Crypto=pycryptodome serial=pyserial jose=python-jose
    jwt=PyJWT dotenv=python-dotenv git=GitPython zmq=pyzmq magic=python-magic usb=pyusb MySQLdb=mysqlclient
    psycopg2=psycopg2-binary ldap=python-ldap docx=python-docx skimage=scikit-image pkg_resources=setuptools<81
    google=protobuf slugify=python-slugify multipart=python-multipart xdist=pytest-xdist pytest_mock=pytest-mock
    ruamel=ruamel.yaml flask_sqlalchemy=Flask-SQLAlchemy rest_framework=djangorestframework markdown=Markdown
    nacl=PyNaCl socks=PySocks gi=PyGObject wx=wxPython lxml_html_clean=lxml_html_clean mpl_toolkits=matplotlib
    distutils=setuptools setuptools=setuptools _pytest=pytest pytest_asyncio=pytest-asyncio httpbin=pytest-httpbin
    aspectlib=aspectlib zope=zope.interface pyximport=Cython jks=pyjks
    """
)
# pytest plugins by the options and fixtures that they add.
OPTIONS = _table(
    """
    --cov=pytest-cov --no-cov=pytest-cov -n=pytest-xdist --numprocesses=pytest-xdist --dist=pytest-xdist
    --timeout=pytest-timeout --benchmark=pytest-benchmark --reruns=pytest-rerunfailures
    --asyncio-mode=pytest-asyncio --black=pytest-black --flake8=pytest-flake8 --isort=pytest-isort
    --mypy=pytest-mypy --pylint=pytest-pylint --doctest-plus=pytest-doctestplus --doctest-rst=pytest-doctestplus
    --ds=pytest-django --nbval=nbval --html=pytest-html --pep8=pytest-pep8 --cov-report=pytest-cov
    --randomly=pytest-randomly --mpl=pytest-mpl --instafail=pytest-instafail --disable-socket=pytest-socket
    --allow-hosts=pytest-socket --pycodestyle=pytest-pycodestyle --ruff=pytest-ruff --checkdocs=pytest-checkdocs
    --snapshot=syrupy --forked=pytest-forked --xdoctest=xdoctest --count=pytest-repeat
    --mypy-ini-file=pytest-mypy-plugins --anyio=anyio
    """
)
FIXTURES = _table(
    """
    mocker=pytest-mock benchmark=pytest-benchmark httpserver=pytest-httpserver freezer=pytest-freezer
    requests_mock=requests-mock snapshot=syrupy datadir=pytest-datadir shared_datadir=pytest-datadir
    data_regression=pytest-regressions file_regression=pytest-regressions subtests=pytest-subtests
    httpbin=pytest-httpbin aiohttp_client=pytest-aiohttp faker=Faker fs=pyfakefs cov=pytest-cov db=pytest-django
    event_loop=pytest-asyncio httpx_mock=pytest-httpx respx_mock=respx monkeysession=pytest-monkeytype
    worker_id=pytest-xdist script_runner=pytest-console-scripts trustme=trustme lazy_fixture=pytest-lazy-fixture
    socket_enabled=pytest-socket aresponses=aresponses
    """
)
_MODULE = re.compile(r"(?:ModuleNotFoundError|ImportError): No module named ['\"]?([A-Za-z0-9_.]+)")
_ARGUMENTS = re.compile(r"unrecognized arguments?: (.*)")
_FIXTURE = re.compile(r"fixture '(\w+)' not found")
_PLUGIN = re.compile(r"Error importing plugin \"([\w.]+)\"|Missing required plugins: ([\w, .<>=-]+)")
_ASYNC = re.compile(r"async def functions are not natively supported")
_HEADER = re.compile(r"fatal error: ([\w/.+-]+\.h(?:pp)?): No such file")
NETWORK = re.compile(
    r"Name or service not known|Temporary failure in name resolution|Network is unreachable|Max retries exceeded"
    r"|getaddrinfo failed|\[Errno -[235]\]|ENOTFOUND|EAI_AGAIN|ConnectError|NewConnectionError|Connection refused"
)


def missing_modules(output: str) -> list[str]:
    """Return the modules that were not found, without repetitions."""
    return list(dict.fromkeys(_MODULE.findall(output)))


def missing_packages(output: str, own: Collection[str]) -> list[str]:
    """Return the requirements that the output of a test run suggests; `own` are the repository's top-level modules."""
    found = []
    for module in missing_modules(output):
        top = module.split(".")[0]
        if (
            top in own
            or top in ("tests", "test", "conftest")
            or (top in sys.stdlib_module_names and top != "distutils")
        ):
            continue
        found.append(DISTRIBUTIONS.get(top, top.replace("_", "-")))
    for line in _ARGUMENTS.findall(output):
        for word in line.split():
            options = (each for each in sorted(OPTIONS, key=len, reverse=True) if word.startswith(each))
            found += [OPTIONS[each] for each in options][:1]
    found += [FIXTURES[name] for name in _FIXTURE.findall(output) if name in FIXTURES]
    for plugin, required in _PLUGIN.findall(output):
        found += [plugin.split(".")[0].replace("_", "-")] if plugin and plugin.split(".")[0] not in own else []
        found += [each.strip() for each in required.split(",") if each.strip()]
    if _ASYNC.search(output):
        found.append("pytest-asyncio")
    return list(dict.fromkeys(found))


def missing_header(output: str) -> str:
    """Return the C header that a build did not find, or the program; empty if there is none."""
    if found := _HEADER.search(output):
        return found[1]
    program = re.search(
        r"(pg_config|mysql_config|pkg-config|xml2-config|krb5-config|\bcmake|\bcargo|\brustc)[^\n]*(not found|No such)",
        output,
    )
    return program[1] if program else ""


def is_network_failure(output: str) -> bool:
    """Return whether a failure looks like a missing network."""
    return bool(NETWORK.search(output))
