// The events of the router: reconnects by itself, and says how fresh what is shown is.

const STALE_MS = 3_500;
const DEAD_MS = 12_000;
const FIRST_PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 10_000;

/** handlers: { history, points, snapshot, decisions, link(state, text) } */
export class Stream {
  constructor(url, handlers) {
    this.url = url;
    this.handlers = handlers;
    this.pauseMs = FIRST_PAUSE_MS;
    this.heardMs = null;
    this.retryMs = null;
    this.why = "";
    this.#connect();
    setInterval(() => this.#look(), 500);
  }

  #connect() {
    this.retryMs = null;
    this.openedMs = performance.now();
    const source = (this.source = new EventSource(this.url));
    const on = (name, act) =>
      source.addEventListener(name, (event) => {
        this.heardMs = performance.now();
        this.pauseMs = FIRST_PAUSE_MS;
        act(JSON.parse(event.data));
      });
    for (const name of ["history", "points", "snapshot", "decisions"]) {
      on(name, (data) => this.handlers[name](data));
    }
    on("end", () => this.#lost("the router has ended"));
    source.onerror = () => this.#lost("no connection");
  }

  #lost(why) {
    this.source.close();
    this.why = why;
    if (this.retryMs !== null) return;
    this.retryMs = performance.now() + this.pauseMs * (0.8 + 0.4 * Math.random());
    this.pauseMs = Math.min(LONGEST_PAUSE_MS, this.pauseMs * 2);
    this.#look();
  }

  #look() {
    const now = performance.now();
    if (this.retryMs !== null) {
      if (now >= this.retryMs) this.#connect();
      else {
        const left = Math.ceil((this.retryMs - now) / 1000);
        this.handlers.link("lost", `disconnected, next try in ${left} s`, this.why);
      }
      return;
    }
    const silentMs = now - (this.heardMs !== null ? Math.max(this.heardMs, this.openedMs) : this.openedMs);
    if (silentMs > DEAD_MS) this.#lost("nothing comes any more");
    else if (this.heardMs === null || this.heardMs < this.openedMs) this.handlers.link("wait", "connecting", "");
    else if (silentMs > STALE_MS) this.handlers.link("stale", `stale for ${Math.round(silentMs / 1000)} s`, "");
    else this.handlers.link("live", "live", "");
  }
}
