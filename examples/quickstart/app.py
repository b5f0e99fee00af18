# app.py
from holdfast import Holdfast, Retry

app = Holdfast("sqlite:///holdfast.db")


@app.task("greet", retry=Retry.exponential(base=2), max_attempts=5, timeout=30)
async def greet(name: str) -> str:
    return f"Hello, {name}!"


if __name__ == "__main__":
    job = greet.sync.enqueue("Ada")
    print(job.sync.result(timeout=30))
