"""README.md followed literally on a bare machine."""

import pytest

from tests import newcomer


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_of_the_readme_does_what_it_says():
    newcomer.main()
