const main = document.getElementById('main');
new EventSource('live').onmessage = (event) => { main.textContent = event.data; };
