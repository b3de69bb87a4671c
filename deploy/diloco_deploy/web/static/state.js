// The page's data: the last message, and the course, rounds and events collected from all messages.

const ROUNDS_KEPT_S = 900;
const EVENTS_MAX = 200;

export function emptyState() {
  return { last: null, points: [], rounds: new Map(), events: new Map(), heardAt: 0 };
}

// A round as an object; `feed.py` sends arrays to save bytes.
function roundOf(row) {
  const [shard, fragment, round, opened, quorum, closed, announced, participants, asked, why, absent, refused, cut] = row;
  const numRefused = Object.values(refused).reduce((sum, n) => sum + n, 0);
  return { shard, fragment, round, opened, quorum, closed, announced, participants, asked, why, absent, refused, cut, numRefused };
}

export function merge(state, message) {
  if (message.whole) {
    state.rounds.clear();
    state.events.clear();
  }
  if (message.course.whole) state.points = [];
  state.points.push(...message.course.points);
  for (const row of message.rounds) {
    const round = roundOf(row);
    state.rounds.set(`${round.shard}/${round.fragment}/${round.round}/${round.opened}`, round);
  }
  const newest = new Map([...state.rounds.values()].map((round) => [`${round.shard}/${round.fragment}`, round]));
  for (const [key, round] of state.rounds) { // in the order of their first message
    const isLast = newest.get(`${round.shard}/${round.fragment}`) === round;
    const isOpen = isLast && round.announced === null && round.cut === null; // kept, however old it is
    if (!isOpen && round.opened < message.now - ROUNDS_KEPT_S) state.rounds.delete(key);
  }
  for (const event of message.events) state.events.set(event.id, event);
  const oldest = [...state.events.values()].sort((a, b) => a.at - b.at);
  for (const event of oldest.slice(0, Math.max(0, oldest.length - EVENTS_MAX))) state.events.delete(event.id);
  state.last = message;
  state.heardAt = performance.now();
  return state;
}
