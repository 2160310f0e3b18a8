"use strict";
// Requests the picture of the run every two seconds and puts its parts, already escaped, into the page.
// The token is in the URL fragment (#), which browsers do not send; it is stored for this tab only.
if (location.hash.length > 1) {
  sessionStorage.setItem("token", decodeURIComponent(location.hash.slice(1)));
  history.replaceState(null, "", location.pathname);
}
const EVERY_MS = 2000, PATIENCE_MS = 10000, STALE_S = 10;
const token = sessionStorage.getItem("token");
const shown = {};
let answered = null; // time of the last response, by the page's own clock
let last = null;
let refused = "";

const clock = () => performance.now() / 1000;

function ago(seconds) {
  const whole = Math.floor(seconds);
  if (whole < 120) return whole + " s ago";
  return whole < 7200 ? Math.floor(whole / 60) + " min ago" : Math.floor(whole / 3600) + " h ago";
}

function words() {
  if (refused) return [refused, true];
  if (last === null) return ["waiting for the first response …", false];
  const since = clock() - answered;
  if (since > STALE_S) return ["muster watch does not respond: last response " + ago(since), true];
  if (last.age_s > STALE_S) return ["muster watch is delayed: last update " + ago(since + last.age_s), true];
  if (last.over) return ["the run has ended", false];
  if (last.heard_s === null) return ["no data from the run yet", false];
  const heard = last.heard_s + last.age_s + since;
  if (heard > STALE_S) return ["no new data from the run: last update " + ago(heard), true];
  return ["live", false];
}

function tell() {
  const [text, stale] = words();
  const heartbeat = document.getElementById("heartbeat");
  if (heartbeat.textContent !== text) heartbeat.textContent = text;
  heartbeat.className = stale ? "stale" : "";
}

async function ask() {
  try {
    const headers = token ? { Authorization: "Bearer " + token } : {};
    const signal = AbortSignal.timeout(PATIENCE_MS);
    const answer = await fetch("picture", { cache: "no-store", headers, signal });
    refused = answer.status === 401 ? "token missing or wrong: open the address that muster watch printed" : "";
    if (answer.ok) {
      last = await answer.json();
      answered = clock();
      document.title = last.title;
      for (const [name, markup] of Object.entries(last.parts)) {
        if (shown[name] !== markup) document.getElementById(name).innerHTML = shown[name] = markup;
      }
    }
  } catch {
    // The server is down or slow; the age of the last response shows it.
  }
  tell();
  setTimeout(ask, EVERY_MS);
}

setInterval(tell, 1000);
ask();
