// The page: one stream of events, a state, and panels that show it once a second at most.

import { showCanary } from "./canary.js";
import { Charts } from "./charts.js";
import { Decisions } from "./decisions.js";
import { byId, setText } from "./dom.js";
import { Fleet } from "./fleet.js";
import { Panels } from "./panels.js";
import { showPolicy } from "./policy.js";
import { showSettings } from "./settings.js";
import { Stream } from "./stream.js";

const ANNOUNCE_MS = 5_000;

const charts = new Charts();
const fleet = new Fleet();
const panels = new Panels();
const decisions = new Decisions();
let snapshot = null;
let isPaused = false;

function show() {
  if (isPaused || !snapshot || document.hidden) return;
  showPolicy(snapshot);
  showSettings(snapshot);
  showCanary(snapshot);
  panels.show(snapshot);
  fleet.show(snapshot);
  decisions.show(snapshot);
  charts.show();
  tell(panels.attention.map((one) => one.title));
}

// What is said aloud: changes only, and not more often than every few seconds.

let said = { link: "live", alerts: new Set() };
let news = [];
let quietUntilMs = 0;

function announce(text) {
  news.push(text);
  const waitMs = Math.max(0, quietUntilMs - performance.now());
  if (news.length === 1) {
    setTimeout(() => {
      setText(byId("announce"), news.join(". "));
      news = [];
      quietUntilMs = performance.now() + ANNOUNCE_MS;
    }, waitMs);
  }
}

function tell(titles) {
  const now = new Set(titles);
  for (const title of now) if (!said.alerts.has(title)) announce(title);
  for (const title of said.alerts) if (!now.has(title)) announce(`Over: ${title}`);
  said.alerts = now;
}

function link(state, text, why) {
  const element = byId("link");
  element.dataset.state = state;
  element.title = why;
  setText(byId("link-text"), text);
  document.body.classList.toggle("is-old", state === "lost" || state === "stale");
  if (state !== said.link && (state === "live" || state === "lost")) {
    announce(state === "live" ? "Connected again" : "Disconnected: the figures are old");
    said.link = state;
  }
}

byId("pause").addEventListener("click", (event) => {
  isPaused = !isPaused;
  event.currentTarget.setAttribute("aria-pressed", String(isPaused));
  setText(event.currentTarget, isPaused ? "Resume" : "Pause");
  document.body.classList.toggle("is-paused", isPaused);
  show();
});
document.addEventListener("visibilitychange", show);

new Stream("admin/events", {
  link,
  history: (history) => charts.take(history),
  points: (points) => charts.add(points),
  decisions: (news) => decisions.take(news),
  snapshot: (fresh) => {
    snapshot = fresh;
    show();
  },
});
