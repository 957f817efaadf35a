"""Every generator there is: importing this registers them."""

from etude.tasks.generate import compose as compose
from etude.tasks.generate import debugging as debugging
from etude.tasks.generate import devops as devops
from etude.tasks.generate import docs as docs
from etude.tasks.generate import feature as feature
from etude.tasks.generate import migration as migration
from etude.tasks.generate import question as question
from etude.tasks.generate import refactor as refactor
from etude.tasks.generate import review as review
from etude.tasks.generate import testing as testing
from etude.tasks.generate.candidate import GENERATORS as GENERATORS
