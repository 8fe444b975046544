import pytest

# As the assertions of test files, so that they tell what they have compared.
pytest.register_assert_rewrite(
    "tests.helpers", "tests.gpu.cuda", "tests.plan.steps", "tests.storage.files", "tests.strategy"
)
