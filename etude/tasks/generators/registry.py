"""Import every generator module, which registers its generators in GENERATORS."""

from etude.tasks.generators import compose as compose
from etude.tasks.generators import debugging as debugging
from etude.tasks.generators import devops as devops
from etude.tasks.generators import docs as docs
from etude.tasks.generators import feature as feature
from etude.tasks.generators import migration as migration
from etude.tasks.generators import question as question
from etude.tasks.generators import refactor as refactor
from etude.tasks.generators import review as review
from etude.tasks.generators import testing as testing
from etude.tasks.generators.candidate import GENERATORS as GENERATORS
