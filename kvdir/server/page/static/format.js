// Figures for people: the units of `kvdir` on the command line, and never a bare number where one is not trusted.

const GROUPED = new Intl.NumberFormat("en-US");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function count(value) {
  return GROUPED.format(Math.round(value));
}

// Short, for tiles and charts: 1,234 · 12.3 k · 4.5 M
export function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (size >= 10 || size === 0 || Number.isInteger(value)) return count(value);
  return value.toFixed(1);
}

export function bytes(value) {
  let unit = 0;
  let size = value;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 || size >= 100 ? Math.round(size) : size.toFixed(1)} ${UNITS[unit]}`;
}

export function share(part, whole) {
  if (!whole) return "–";
  const percent = (100 * part) / whole;
  return percent > 0 && percent < 10 ? `${percent.toFixed(1)} %` : `${Math.round(percent)} %`;
}

export function span(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function clock(ms) {
  return new Date(ms).toLocaleTimeString("en-GB");
}

// [value, why it is not trusted] as text: ~ marks what is not.
export function figure([value, why], format = count) {
  return why ? `~${format(value)}` : format(value);
}
