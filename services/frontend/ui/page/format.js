// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value < 100000 ? whole.format(value) : short.format(value));

export const rate = (value) => (value === null ? "–" : value < 10 && value > 0 ? value.toFixed(1) : count(Math.round(value)));

export const percent = (share) => (share > 0 && share < 0.01 ? "<1 %" : `${Math.floor(100 * share)} %`);

/** Seconds as a duration with its unit. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0005) return "<1 ms";
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 99.95) return `${seconds.toFixed(1)} s`;
  return age(seconds);
}

/** Seconds as an age, of one unit. */
export function age(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

export function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  let value = size;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${value < 10 && at ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

/** The first digits of an instance's id, by which people tell instances apart. */
export const brief = (id) => (id.length > 10 ? id.slice(0, 8) : id);

export const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[(sorted.length - 1) >> 1];
}
