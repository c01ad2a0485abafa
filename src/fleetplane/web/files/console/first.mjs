// How to get the first of a kind: the command to paste, where a page or a button is not the way.

/** @type {Record<string, string>} */
const FIRST = {
  "access-lists": "fleetplane apply -f FILE",
  accounts: "fleetplane boards user add NAME --role operator",
  boards: "fleetplane boards join-token create --name NAME",
  certificates: "fleetplane apply -f FILE",
  clusters: "fleetplane boards cluster create NAME",
  "edge-configs": "fleetplane edge config set FILE",
  "edge-groups": "fleetplane edge group create NAME --selector os=linux",
  "edge-nodes": "fleetplane edge token --name NAME",
  freezes: "fleetplane freeze --scope SCOPE --reason WORDS",
  gpus: "fleetplane agent gpu --simulate 4",
  groups: "fleetplane apply -f FILE",
  instances: "fleetplane instances scale GROUP 1",
  pins: "fleetplane boards gpio add BOARD:17 --direction output",
  providers: "fleetplane agent gpu --simulate 4",
  releases: "fleetplane releases add WHEEL",
  rollouts: "fleetplane rollout start SUBJECT SCOPE",
  "rollout-policies": "fleetplane rollout policy set SUBJECT SCOPE --policy FILE",
  runs: "fleetplane run --on edge-nodes -- uname -a",
  tokens: "fleetplane tokens create NAME --role viewer",
};

/** @param {string} plural */
export const firstCommand = (plural) => FIRST[plural] ?? "";
