// The pages of fleets, in the order of the menu. One is there for those who may see something of its kinds.

import { accessPage } from "./pages/access.mjs";
import { auditPage } from "./pages/audit.mjs";
import { boardsPage } from "./pages/boards.mjs";
import { edgePage } from "./pages/edge.mjs";
import { gpusPage } from "./pages/gpus.mjs";
import { groupsPage } from "./pages/groups.mjs";
import { machinesPage } from "./pages/machines.mjs";
import { proxiesPage } from "./pages/proxies.mjs";
import { rolloutsPage } from "./pages/rollouts.mjs";
import { serversPage } from "./pages/servers.mjs";
import { MACHINE_KINDS } from "./model.mjs";

/**
 * @typedef {import("./main.mjs").App} App
 * @typedef {import("./main.mjs").Page} Page
 * @type {{name: string, title: string, summary: string, kinds: string[], make: (app: App, query: Record<string, string>) => Page}[]}
 */
export const PAGES = [
  { name: "machines", title: "Machines", summary: "Everything that has an agent", kinds: MACHINE_KINDS, make: machinesPage },
  { name: "gpus", title: "GPUs", summary: "Health of GPUs", kinds: ["gpus"], make: gpusPage },
  { name: "groups", title: "Groups", summary: "Groups of instances", kinds: ["groups"], make: groupsPage },
  { name: "proxies", title: "Proxies", summary: "NGINX and what they serve", kinds: ["workspaces", "proxy-agents"], make: proxiesPage },
  { name: "boards", title: "Boards", summary: "Boards, their pins and logs", kinds: ["boards"], make: boardsPage },
  { name: "edge", title: "Edge", summary: "Daemons, and commands on many of them", kinds: ["edge-nodes"], make: edgePage },
  { name: "rollouts", title: "Rollouts", summary: "Changes in waves", kinds: ["rollouts"], make: rolloutsPage },
  { name: "servers", title: "Servers", summary: "The servers themselves", kinds: ["servers"], make: serversPage },
  { name: "audit", title: "Audit", summary: "Who did what", kinds: ["audit-entries"], make: auditPage },
  { name: "access", title: "Access", summary: "People, roles, tokens and sessions", kinds: [], make: accessPage },
];
