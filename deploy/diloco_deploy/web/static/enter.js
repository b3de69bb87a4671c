// Sends the key, typed or from the address. Browsers never send the part after # by themselves.

const answer = document.getElementById("answer");

async function enter(key) {
  const response = await fetch("/enter", { method: "POST", body: key });
  if (response.ok) location.replace("/");
  else if (response.status !== 403) answer.textContent = "The server is busy. Try again.";
  else answer.textContent = "That is not the key. A new start of the command makes a new one.";
}

document.getElementById("form").addEventListener("submit", (event) => {
  event.preventDefault();
  enter(document.getElementById("key").value);
});

const given = new URLSearchParams(location.hash.slice(1)).get("key");
if (given) {
  history.replaceState(null, "", "/");
  enter(given);
}
