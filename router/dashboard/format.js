// Numbers as people read them: always with a unit, unknown is a dash and never 0.

export const NONE = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SIZES = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** 1,234 · 45.1k · 3.20M */
export function count(value) {
  if (value == null) return NONE;
  if (Math.abs(value) < 10_000) return whole.format(value);
  for (const [size, letter] of SIZES) {
    if (Math.abs(value) >= size) return digits(value / size) + letter;
  }
  return whole.format(value);
}

/** Three significant digits, as far as there are any: 0.25, 4.71, 38.2, 512. */
export function digits(value) {
  const size = Math.abs(value);
  if (size === 0 || size >= 99.95) return whole.format(value);
  return value.toFixed(size >= 9.995 ? 1 : 2);
}

/** Seconds: 840 µs · 12 ms · 1.24 s · 3.5 min */
export function time(seconds) {
  if (seconds == null) return NONE;
  if (seconds === 0) return "0 ms";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.9995) return `${seconds < 0.01 ? (seconds * 1e3).toFixed(1) : Math.round(seconds * 1e3)} ms`;
  if (seconds < 99.95) return `${digits(seconds)} s`;
  return age(seconds);
}

/** How long something lasts: 8 s · 4 min · 3 h 12 min · 5 d 2 h */
export function age(seconds) {
  if (seconds == null) return NONE;
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return hours % 24 ? `${days} d ${hours % 24} h` : `${days} d`;
}

/** A share in [0, 1]: 83.4 % */
export function percent(share) {
  if (share == null) return NONE;
  const value = share * 100;
  if (value === 0 || value >= 99.995) return `${Math.round(value)} %`;
  return value < 0.1 ? `${value.toFixed(2)} %` : `${value.toFixed(1)} %`;
}

/** A rate with its unit left to the caller: 0.4 · 12.5 · 1,240 */
export function rate(value) {
  if (value == null) return NONE;
  return value < 99.95 ? value.toFixed(1) : whole.format(value);
}

const clockSeconds = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const clockMinutes = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });

export function clock(unixSeconds) {
  return clockSeconds.format(new Date(unixSeconds * 1000));
}

export function minute(unixSeconds) {
  return clockMinutes.format(new Date(unixSeconds * 1000));
}

/** "1 replica", "3 replicas" */
export function many(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function bytes(value) {
  if (value == null) return NONE;
  for (const [size, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${digits(value / size)} ${name}`;
  }
  return `${value} B`;
}
