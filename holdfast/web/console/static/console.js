// Live pages of the console: refreshes the part #live in place, and says so when the API or its store is away.
"use strict";
(() => {
  const INTERVAL = 4000;
  const SHARE = 20; // a refresh that takes a second is asked for every twenty
  const RETRY = 2000;
  const PAUSED = "holdfast.console.paused";
  const banner = document.getElementById("connection");
  const button = document.getElementById("live-switch");
  const live = () => document.getElementById("live");
  let isPaused = sessionStorage.getItem(PAUSED) === "1";
  let timer = 0;
  let begun = 0;

  // What the reader has opened stays open; a server knows nothing of it.
  Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, element) =>
    !(name === "open" && element.localName === "details");

  const isLive = () => live()?.hasAttribute("hx-get") ?? false;

  const isInUse = () => {
    const region = live();
    const selection = getSelection();
    const hasSelection = selection && !selection.isCollapsed && region.contains(selection.anchorNode);
    return hasSelection || region.querySelector("details.confirm[open]") !== null;
  };

  const schedule = (delay) => {
    clearTimeout(timer);
    if (isLive()) timer = setTimeout(refresh, delay);
  };

  const refresh = () => {
    const isWaiting = live()?.hasAttribute("data-waiting");
    if (!isLive() || document.hidden || (isPaused && !isWaiting) || isInUse()) {
      schedule(INTERVAL);
      return;
    }
    begun = performance.now();
    htmx.trigger(live(), "refresh");
  };

  const say = (text) => {
    if (banner && banner.textContent !== text) banner.textContent = text;
  };

  const showSwitch = () => {
    if (!button) return;
    button.hidden = !isLive();
    button.textContent = isPaused ? "Paused" : "Live";
    button.setAttribute("aria-pressed", String(!isPaused));
  };

  button?.addEventListener("click", () => {
    isPaused = !isPaused;
    sessionStorage.setItem(PAUSED, isPaused ? "1" : "0");
    showSwitch();
    schedule(0);
  });

  document.addEventListener("htmx:afterSettle", () => {
    say("");
    showSwitch();
    document.documentElement.dataset.refreshes = String(Number(document.documentElement.dataset.refreshes ?? 0) + 1);
    schedule(Math.max(INTERVAL, SHARE * (performance.now() - begun)));
  });
  document.addEventListener("htmx:responseError", (event) => {
    const status = event.detail.xhr.status;
    if (status === 404) {
      say("This is not in the store any more.");
      return;
    }
    if (status === 422) {
      say("The search took too long. Narrow the filters; this page is not refreshed any more.");
      return;
    }
    say(
      status === 503
        ? "The store does not answer. You see its last known state; this page tries again by itself."
        : `The page cannot be refreshed now (${status}). It tries again by itself.`,
    );
    schedule(RETRY);
  });
  for (const name of ["htmx:sendError", "htmx:timeout"]) {
    document.addEventListener(name, () => {
      say("Holdfast does not answer. You see the last known state; this page tries again by itself.");
      schedule(RETRY);
    });
  }
  document.addEventListener("visibilitychange", () => document.hidden || schedule(0));

  // A question closes by Escape, and by a click elsewhere.
  const close = (details) => {
    details.open = false;
    details.querySelector("summary").focus();
  };
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    const details = document.activeElement?.closest("details.confirm[open]");
    if (details) close(details);
  });
  document.addEventListener("click", (event) => {
    for (const details of document.querySelectorAll("details.confirm[open]")) {
      if (!details.contains(event.target)) details.open = false;
    }
  });

  // A reload does not repeat a notice.
  const address = new URL(location.href);
  if (address.searchParams.has("notice")) {
    address.searchParams.delete("notice");
    history.replaceState(null, "", address);
  }

  // The next thousand jobs of a change, until the reader stops it. The history gets no entry: Back leads to the count.
  const form = document.getElementById("go-on");
  let isRunning = false;
  const goOn = async () => {
    if (isRunning) return;
    isRunning = true;
    try {
      const body = new URLSearchParams(new FormData(form));
      const answer = await fetch(form.getAttribute("action"), { method: "POST", body });
      if (answer.redirected) {
        location.replace(answer.url);
        return;
      }
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const main = page.getElementById("main");
      if (answer.status >= 500 || !main) throw new Error(`answered ${answer.status}`);
      Idiomorph.morph(document.getElementById("main"), main);
      say("");
      begin();
    } catch {
      say("Holdfast does not answer. Whether these jobs were changed is not known: go on when it is back.");
    } finally {
      isRunning = false;
    }
  };
  const begin = () => {
    if (!document.contains(form)) return;
    const going = setTimeout(goOn, 300);
    document.getElementById("halt").onclick = (event) => {
      clearTimeout(going);
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      location.replace(event.currentTarget.href);
    };
    form.onsubmit = (event) => {
      event.preventDefault();
      clearTimeout(going);
      goOn();
    };
  };
  if (form) begin();

  showSwitch();
  schedule(INTERVAL);
})();
