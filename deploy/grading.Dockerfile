FROM python:3.12-slim
COPY . /course
RUN pip install --no-cache-dir -r /course/requirements.lock && pip install --no-cache-dir --no-deps -e /course
