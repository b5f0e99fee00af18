"""The integration with Django on Django 5.2 and 6: tests of ``django.tasks`` for its backends, and of the example shop.

``python -m tools.django_tasks_suite`` runs all of them, each version of Django in an environment of its own.
"""
