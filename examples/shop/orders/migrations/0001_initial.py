"""The table of orders."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Creates the table."""

    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("email", models.EmailField(max_length=254)),
                ("confirmed", models.BooleanField(default=False)),
                ("mails", models.PositiveIntegerField(default=0)),
            ],
        )
    ]
