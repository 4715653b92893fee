# A marker that says the same for both machines of `environments` in pyproject.toml is said once, without them.
s/ ; \(([^()]*) and platform_machine == 'aarch64'([^()]*) and sys_platform == 'linux'\) or \(\1 and platform_machine == 'x86_64'\2 and sys_platform == 'linux'\)$/ ; \1\2/
s/ ; python_full_version < '3.14'$//
